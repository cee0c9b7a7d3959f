"""Commands that set up a relay: they create files, such as keys and users, and check the configuration."""
