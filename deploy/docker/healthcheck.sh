#!/bin/sh
# Whether the service in this container is ready: GET /ready at the container's own address. $1: port.
exec /opt/headrace/bin/python -c "
import sys, urllib.request
urllib.request.urlopen(f'http://{sys.argv[1]}:{sys.argv[2]}/ready', timeout=3)
" "$(hostname -i | cut -d' ' -f1)" "$1" 2>/dev/null
