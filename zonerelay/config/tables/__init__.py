"""One module for each TOML table: its settings with defaults and reasons, its checks and its advice.

`check_…` functions put what cannot be into a `Report`; `…_advice` functions yield sentences about what is
valid and may surprise. Both are given the tables that they compare. Outside of config/, import from
`config.settings`.
"""
