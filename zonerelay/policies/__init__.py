"""Policies that come with the relay, written with what every operator has: `zonerelay.inbound.policy`."""
