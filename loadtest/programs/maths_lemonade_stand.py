# SHOWS: grade-school arithmetic in one function, the commonest tool call of all
# EXPECT: ok
# STDOUT: 28.75
def lemonade_profit():
    """Mia sells 35 cups of lemonade for $1.50 each. The lemons cost $14 and the sugar $6.
    She also has to pay half of a sign that cost $7.50. How much does she earn?"""
    cups_sold = 35
    price_per_cup = 1.50
    lemons_cost = 14
    sugar_cost = 6
    sign_cost = 7.50 / 2
    income = cups_sold * price_per_cup
    profit = income - lemons_cost - sugar_cost - sign_cost
    return profit

result = lemonade_profit()
print(result)
