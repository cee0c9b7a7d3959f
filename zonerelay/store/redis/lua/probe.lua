-- now: can what lets mail leave be written?
call('SET', P .. 'probe', take())
return true
