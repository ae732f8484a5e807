# SHOWS: LaTeX turned into plain text with pylatexenc
# EXPECT: ok
# STDOUT: x ≤ 3 and ∑ = π
from pylatexenc.latex2text import LatexNodes2Text

print(LatexNodes2Text().latex_to_text(r"$x \le 3$ and $\sum = \pi$"))
