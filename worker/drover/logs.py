"""structlog set-up: one function, called once by each process."""

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["console", "json"]


def configure(log_format: LogFormat = "console", verbose: bool = False) -> None:
    """Send log events to standard error, as coloured lines or as one JSON object a line."""
    level = logging.DEBUG if verbose else logging.INFO
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
