"""Header sections: `headers` finds, parses and folds fields, and writes the relay's own;
`address_fields` changes them.

All modules are for code outside.
"""
