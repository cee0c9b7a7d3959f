"""The worker's side of shared limits: its allowance, its reserved send times, and the exchange with the
authority.
"""
