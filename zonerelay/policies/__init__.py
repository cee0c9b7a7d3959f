"""Policies that come with the relay; they use only the public interface, `zonerelay.inbound.policy`."""
