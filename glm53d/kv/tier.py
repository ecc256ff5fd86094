"""The native index of a slower tier: which pages it holds, by hash. [R32]

Its contract is in native/include/glm53d/tier_index.h and in its docstrings.
"""

from glm53d._native import TierIndex

__all__ = ["TierIndex"]
