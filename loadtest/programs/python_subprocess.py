# SHOWS: a second interpreter as a subprocess, with pipes and /dev/null
# EXPECT: ok
# STDOUT: 42
# STDOUT: exit code 5
import subprocess, sys

out = subprocess.run([sys.executable, "-c", "print(int(input()) * 2)"], input="21", capture_output=True, text=True, check=True)
print(out.stdout.strip())
child = subprocess.run([sys.executable, "-c", "raise SystemExit(5)"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("exit code", child.returncode)
