"""Notifies people of incidents, recoveries and ends of jobs: webhook, Slack's format, e-mail."""
