# SHOWS: scipy.stats, probabilities and a t-test
# EXPECT: ok
# STDOUT: P(X <= 3) = 0.1719
# STDOUT: P(Z > 1.96) = 0.0250
# STDOUT: the means differ
from scipy import stats

print(f"P(X <= 3) = {stats.binom.cdf(3, 10, 0.5):.4f}")
print(f"P(Z > 1.96) = {stats.norm.sf(1.96):.4f}")
before = [12.1, 11.8, 12.4, 12.0, 11.9, 12.2]
after = [12.9, 12.7, 13.1, 12.8, 13.0, 12.6]
t, p = stats.ttest_ind(before, after)
print("the means differ" if p < 0.01 else "no difference shown")
