"""What the planner answers: the table, JSON and the page with its charts."""
