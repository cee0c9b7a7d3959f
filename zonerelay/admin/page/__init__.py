"""The operators' web page, which makes the same requests as the command line and the API.

The HTTP server imports only `page`. `views` show data and `acts` change it. `templates` has the HTML;
`static` has the style, the script, and htmx with its licence.
"""
