"""The declaration of options, and the conversion of their TOML values. Error messages contain an example."""
