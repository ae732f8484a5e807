# SHOWS: there is no network, not even to the own host
# EXPECT: error
# STDOUT: no socket to 127.0.0.1
# STDERR-HAS: urllib.error.URLError: <urlopen error
import socket
import urllib.request

try:
    socket.create_connection(("127.0.0.1", 8000), timeout=2)
    print("connected")
except OSError:
    print("no socket to 127.0.0.1")
urllib.request.urlopen("http://127.0.0.1:8000/healthz", timeout=2).read()
