"""The tables of the configuration file. The module of each table has its settings, its checks and its advice.

`check_…` functions refuse invalid settings in a `Report`. `…_advice` functions yield sentences about valid
settings that may surprise. Both receive the tables that they compare. Code outside config/ imports from
`config.settings`.
"""
