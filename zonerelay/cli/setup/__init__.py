"""Commands that set a relay up: they make files, such as keys and users, and check its configuration."""
