# SHOWS: top-level statements without any function, and formatted money
# EXPECT: ok
# STDOUT: Price after discount: $61.20
# STDOUT: Total with tax: $65.48
original_price = 72
discount = 0.15
tax = 0.07

# Step 1: take the discount off
price = original_price * (1 - discount)
print(f"Price after discount: ${price:.2f}")

# Step 2: add the tax
total = price * (1 + tax)
print(f"Total with tax: ${total:.2f}")
