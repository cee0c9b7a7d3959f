"""The parts that several engines share: records, group commit, claims, health, recovery, checks.

No module here knows an engine; each raises StoreError alone.
"""
