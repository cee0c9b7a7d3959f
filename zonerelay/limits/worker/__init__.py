"""The part of shared limits that runs in each worker: allowances, leased turns, and the exchange with the
authority.
"""
