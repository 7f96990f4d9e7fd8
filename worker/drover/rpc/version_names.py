"""What the rows of `versions` are called, the newest first: all that a command line has to know before it runs."""

NAMES = ("8.0", "7.0", "6.0", "5.1", "5.0", "4.0", "4.0.2", "4.0.1", "4.0.0", "3.6", "2.0")
"""As a user gives them; where a patch renumbered operations, each has its own."""
BRIEF = ("3.6", "2.0")
"""Those that greet briefly: this, and nothing else of its version, can be told of a client."""
