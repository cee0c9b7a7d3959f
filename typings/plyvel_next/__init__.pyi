"""The fork of plyvel for Python 3.12 and later; the interface is plyvel's."""

from plyvel import *
