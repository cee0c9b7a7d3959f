"""The declaration of an option, and the conversion of its TOML value; an error text holds an example."""
