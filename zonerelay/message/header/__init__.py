"""Header sections: `headers` finds, parses and folds fields, `address_fields` changes them,
`received` writes the relay's own.

All modules are for code outside.
"""
