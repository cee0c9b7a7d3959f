"""Tests of the engines of ordered keys."""
