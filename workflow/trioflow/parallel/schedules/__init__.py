"""Pipeline schedules: tables of actions, the orders they come in, their checks, and how they are found."""
