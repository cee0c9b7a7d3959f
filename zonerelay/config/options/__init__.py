"""Declares configuration options, and converts their TOML values. Error messages contain an example."""
