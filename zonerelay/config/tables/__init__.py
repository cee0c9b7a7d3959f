"""The tables of the file: the module of each has its settings, its checks and its advice.

`check_…` functions refuse impossible settings in a `Report`; `…_advice` functions yield sentences about
valid settings that may surprise. Both are given the tables that they compare. Outside of config/, import
from `config.settings`.
"""
