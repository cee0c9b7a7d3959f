"""TOML in, typed settings out; every mistake at once, with its line."""
