"""The rows that this relay processes: claims, the window that limits them, composition, and the writing of
outcomes.
"""
