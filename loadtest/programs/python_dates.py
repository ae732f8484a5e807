# SHOWS: calendar questions with datetime
# EXPECT: ok
# STDOUT: Thursday
# STDOUT: 59 days
# STDOUT: 12 Friday-the-13ths from 2020 to 2026
from datetime import date, timedelta

print(date(2024, 2, 29).strftime("%A"))
print((date(2023, 3, 1) - date(2023, 1, 1)).days, "days")
d, count = date(2020, 1, 1), 0
while d <= date(2026, 12, 31):
    if d.day == 13 and d.weekday() == 4:
        count += 1
    d += timedelta(days=1)
print(count, "Friday-the-13ths from 2020 to 2026")
