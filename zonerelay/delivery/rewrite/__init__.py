"""The changes that a zone makes to a message before it is sent, such as header fields and signatures.
`rendering` is the entry point.

The worker, which creates the renderer, imports it.
"""
