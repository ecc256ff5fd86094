"""The native prefix tree of one KV pool: match, lock, insert, evict. [R27]

Its contract is in native/include/glm53d/prefix_tree.h and in its docstrings.
"""

from glm53d._native import PrefixTree

__all__ = ["PrefixTree"]
