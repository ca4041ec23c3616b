"""Rows from rank to rank: straight, in two levels, through memory that a node's ranks share, and the choice of one."""
