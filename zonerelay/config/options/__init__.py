"""One option and its value: how a table declares it, how a TOML value is converted, what a problem says."""
