"""Header sections: `headers` finds and parses them, `edits` and `address_fields` change them.

`received` writes the relay's own fields, `folding` makes foreign text fit for a field.

All modules are for code outside.
"""
