# SHOWS: a table read from a file, grouped and printed with pandas
# EXPECT: ok
# FILE: sales.csv = "shop,item,units,price\nnorth,pen,10,1.5\nsouth,pen,4,1.5\nnorth,book,3,12.0\nsouth,book,5,12.0\n"
# STDOUT: shop
# STDOUT: north    51.0
# STDOUT: south    66.0
# STDOUT: Name: revenue, dtype: float64
# STDOUT: best shop: south
import pandas as pd

df = pd.read_csv("sales.csv")
df["revenue"] = df["units"] * df["price"]
by_shop = df.groupby("shop")["revenue"].sum()
print(by_shop)
print("best shop:", by_shop.idxmax())
