"""Delivery status notifications: `report` composes the message, `text` writes its part for people.

Code outside takes `report`.
"""
