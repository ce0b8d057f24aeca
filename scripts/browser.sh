#!/usr/bin/env bash
# Finds or installs a browser for the tests marked `browser`. Never fails: without one they are skipped.
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" >/dev/null; then
        exit 0
    fi
done

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "No browser found: installing Debian's chromium."
    export DEBIAN_FRONTEND=noninteractive
    if apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1; then
        exit 0
    fi
    echo "Could not install chromium: tests marked 'browser' will be skipped."
else
    echo "No chromium or google-chrome on PATH: tests marked 'browser' will be skipped."
fi
exit 0
