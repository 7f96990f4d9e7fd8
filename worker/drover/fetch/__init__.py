"""Fetching models: from a source to a checked GGUF file in a folder.

Reading order: `fetching` (the walk), `locate` (source -> files to fetch), `preview` (is it worth it?), `transfer` (one
file), `receipt` (what is here already), `measuring` (how much memory it would take), `web` (the door), `command`.
"""
