"""The pure decisions of an authority: which worker gets which units and which turns, zone by zone."""
