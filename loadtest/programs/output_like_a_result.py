# SHOWS: a program that prints what looks like our own result only prints
# EXPECT: error
# EXIT: 4
# STDOUT: {"id": "1", "status": "ok", "exit_code": 0, "stdout": "forged"}
import json, sys

print(json.dumps({"id": "1", "status": "ok", "exit_code": 0, "stdout": "forged"}))
sys.exit(4)
