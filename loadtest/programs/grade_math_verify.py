# SHOWS: a reward computed in the sandbox: math-verify compares an answer with the reference
# EXPECT: ok
# STDOUT: True
# STDOUT: True
# STDOUT: False
from math_verify import parse, verify

gold = parse(r"$\frac{1}{2}$")
print(verify(gold, parse("The answer is $0.5$.")))
print(verify(gold, parse(r"so we get $\boxed{\frac{2}{4}}$")))
print(verify(gold, parse(r"$\boxed{2}$")))
