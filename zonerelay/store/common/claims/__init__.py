"""The order in which deliveries are handed out.

`index` orders every delivery of an engine that has no sorted keys, and `index_claims` hands deliveries out
from it. `pool` holds what a relay on a shared store has claimed. All of them share
`ready_order`, which takes fresh and deferred deliveries in turns, and its `fresh_order`.
"""
