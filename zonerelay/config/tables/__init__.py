"""Defines the tables of the configuration file with their options. The module of each table has its settings,
its checks and its advice.

`…_problems` functions yield what is invalid in a table, and `…_advice` functions what is valid and may
surprise (`problems.Findings`). `check_…` functions refuse wrong names in a `Report`. All receive the tables
that they compare. Code outside config/ imports from
`config.settings`.
"""
