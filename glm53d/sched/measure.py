"""What the scheduler learns from the steps that ran: how long the next would take, and how long streams have waited.

Times come in with results; nothing here reads a clock. Each model is a line through two features, fitted to decayed
sums, so a few hundred steps are remembered and adding one costs a dozen multiplications.
"""

DECAY = 0.99


class TwoTermFit:
    """y = a * u + b * v with a, b >= 0, by least squares over decayed samples."""

    def __init__(self) -> None:
        self._uu = self._uv = self._vv = self._uy = self._vy = 0.0

    def add(self, u: float, v: float, y: float) -> None:
        """One sample."""
        self._uu = DECAY * self._uu + u * u
        self._uv = DECAY * self._uv + u * v
        self._vv = DECAY * self._vv + v * v
        self._uy = DECAY * self._uy + u * y
        self._vy = DECAY * self._vy + v * y

    def solve(self) -> tuple[float, float]:
        """(a, b). While the samples cannot tell u from v, or one of them comes out negative, u explains all it can."""
        det = self._uu * self._vv - self._uv * self._uv
        if det > 1e-6 * self._uu * self._vv:
            a = (self._uy * self._vv - self._vy * self._uv) / det
            b = (self._vy * self._uu - self._uy * self._uv) / det
            if a >= 0 and b >= 0:
                return a, b
            if a < 0:
                return 0.0, max(0.0, self._vy / self._vv)
        return (max(0.0, self._uy / self._uu) if self._uu else 0.0), 0.0


class StepCost:
    """How long a step takes, on the attention-DP rank that has most to do, for ranks go in lock-step. [R29]

    ns = fixed + per_row * decoding rows   learnt from steps without prompt tokens
       + per_token * prompt tokens         learnt from steps with some: what they took above the first line
       + per_area * prompt tokens * context
    """

    def __init__(self) -> None:
        self._decode = TwoTermFit()
        self._prefill = TwoTermFit()
        self.most_tokens = 0  # of any step measured: beyond twice that the model is not believed

    def add(self, num_rows: int, num_tokens: int, area: float, took_ns: int) -> None:
        """A step has run."""
        if num_tokens:
            self.most_tokens = max(self.most_tokens, num_tokens)
            self._prefill.add(num_tokens, area, max(0.0, took_ns - self.decode_ns(num_rows)))
        else:
            self._decode.add(1.0, num_rows, took_ns)

    def decode_ns(self, num_rows: int) -> float:
        """A step of decoding rows alone."""
        fixed, per_row = self._decode.solve()
        return fixed + per_row * num_rows

    def prefill_ns(self) -> tuple[float, float]:
        """(per_token, per_area)."""
        return self._prefill.solve()


class Rate:
    """Prompt tokens that the node computes per second when it has enough to do: ns = per_token * tokens.

    Least squares, so the largest steps count most: what a step costs whatever it holds hardly shows in them.
    """

    def __init__(self) -> None:
        self._squares = self._ns = 0.0

    def add(self, num_tokens: int, took_ns: int) -> None:
        """A step has run that had to cut a prompt. One that had not may have been short of work, and tells nothing."""
        self._squares = DECAY * self._squares + num_tokens * num_tokens
        self._ns = DECAY * self._ns + num_tokens * took_ns

    @property
    def per_second(self) -> int:
        """0: not measured yet."""
        return int(self._squares * 1e9 / self._ns) if self._ns else 0

    def ns_of(self, num_tokens: int) -> int:
        """How long so many would take; 0 while nothing is known."""
        return int(num_tokens * self._ns / self._squares) if self._squares else 0


class LongestGap:
    """The longest gap between two tokens of one stream while it ran, of the last `window_ns` to twice that."""

    def __init__(self, window_ns: int = 10_000_000_000):
        self._window_ns = window_ns
        self._since_ns = 0
        self._now = self._before = 0

    def add(self, gap_ns: int, now_ns: int) -> None:
        """The longest gap that ended with this step."""
        if now_ns - self._since_ns > self._window_ns:
            stale = now_ns - self._since_ns > 2 * self._window_ns
            self._before, self._now, self._since_ns = 0 if stale else self._now, 0, now_ns
        self._now = max(self._now, gap_ns)

    def longest_ns(self, now_ns: int) -> int:
        """0: no stream went on in that time."""
        age = now_ns - self._since_ns
        if age > 2 * self._window_ns:
            return 0
        return self._now if age > self._window_ns else max(self._now, self._before)
