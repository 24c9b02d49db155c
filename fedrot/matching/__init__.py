"""How the best move is found: one small module per kind of group, all in closed form."""
