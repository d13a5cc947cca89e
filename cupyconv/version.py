"""The version, for people, packaging and `show_config`."""

__version__ = "0.1.0"
