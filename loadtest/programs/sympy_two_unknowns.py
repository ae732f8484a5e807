# SHOWS: a system of equations, solved with sympy
# EXPECT: ok
# STDOUT: 13
from sympy import symbols, Eq, solve

def chickens_and_rabbits():
    """35 heads and 96 legs in a yard of chickens and rabbits. How many rabbits are there?"""
    chickens, rabbits = symbols('chickens rabbits')
    solution = solve([Eq(chickens + rabbits, 35), Eq(2*chickens + 4*rabbits, 96)], (chickens, rabbits))
    return solution[rabbits]

answer = chickens_and_rabbits()
print(answer)
