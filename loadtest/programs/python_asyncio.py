# SHOWS: asyncio with gathered tasks and a timeout
# EXPECT: ok
# STDOUT: [1, 4, 9]
# STDOUT: too slow
import asyncio

async def square(n):
    await asyncio.sleep(0.01 * n)
    return n * n

async def main():
    print(await asyncio.gather(*(square(n) for n in (1, 2, 3))))
    try:
        await asyncio.wait_for(asyncio.sleep(30), timeout=0.05)
    except asyncio.TimeoutError:
        print("too slow")

asyncio.run(main())
