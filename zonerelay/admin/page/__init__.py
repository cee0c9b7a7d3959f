"""The operators' page: HTML for people, from the same requests as the command line and the API.

The server takes `page` alone. `views` show, `acts` change; `templates` has the HTML, `static` the style, the
script, and htmx with its licence.
"""
