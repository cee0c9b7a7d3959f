"""The declaration of an option, and the conversion of its TOML value with an error text that has an example."""
