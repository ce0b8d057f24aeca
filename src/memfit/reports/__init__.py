"""Ways to show an answer: plain text, a coloured terminal, a self-contained web page."""
